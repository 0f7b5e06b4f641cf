"""The command line as `python -m offload`, and so as `torchrun -m -- offload`."""

from offload.cli.main import main

if __name__ == "__main__":
    main()
