"""`python -m minihisparse`."""

from minihisparse.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
