"""``python -m indexd``."""

from indexd.cli.main import main

if __name__ == "__main__":
    main()
