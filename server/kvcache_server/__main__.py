"""`python -m kvcache_server` is `kvcache-server`."""

from kvcache_server.cli import main

if __name__ == "__main__":
    main()
