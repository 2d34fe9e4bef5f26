import sys

if __name__ == "__main__":  # workers import this file again
    if not sys.flags.safe_path:
        sys.path.pop(0)  # `python -m` puts the current folder there: modules in it are not imported
    from m1clip.cli import main

    main()
