"""What the command line does besides `serve`, a module a command.

It never touches the region: a command asks the daemon, as any client does.
"""
