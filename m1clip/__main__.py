from m1clip.cli import main

main()
