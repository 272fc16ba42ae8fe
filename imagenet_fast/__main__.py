from imagenet_fast.cli import main

main()
