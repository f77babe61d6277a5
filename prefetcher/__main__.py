"""`python -m prefetcher`."""

from prefetcher.cli import main

if __name__ == "__main__":
    main()
