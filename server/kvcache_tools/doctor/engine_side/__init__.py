"""The engine-side checks of `kvcache-server doctor`. Each runs in its own process, which may crash."""
