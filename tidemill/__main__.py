"""`python -m tidemill` runs the `tidemill` command."""

from tidemill.cli.__main__ import main

if __name__ == "__main__":
    main()
