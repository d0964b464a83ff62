"""The ground that client and daemon stand on: types, messages, codec, region layout, errors."""

__version__ = "0.1.0"
