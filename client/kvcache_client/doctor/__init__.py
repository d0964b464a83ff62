"""The checks of `kvcache-server doctor` on the engine's side. Each has a process of its own, which may crash."""
