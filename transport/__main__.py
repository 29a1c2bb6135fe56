"""``python -m transport``: the same as the command ``transport``."""

from transport.cli import main

if __name__ == "__main__":
    main()
