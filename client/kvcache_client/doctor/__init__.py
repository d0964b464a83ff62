"""What `kvcache-server doctor` asks of the engine's side; each question has a process of its own, which may die."""
