from m1clip.cli import main

if __name__ == "__main__":  # workers import this file again
    main()
