"""`python -m offload`, and so `torchrun -m -- offload`: the command line."""

from offload.cli.main import main

if __name__ == "__main__":
    main()
