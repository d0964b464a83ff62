"""The ground that client and daemon stand on: types, messages, codec, region layout, errors."""

__version__ = "0.2.0"
