"""All code that knows vLLM: the connector, plain views of its objects, its versions, and the identity of its KV.

It decides nothing about saves and loads, and none of its exceptions leaves a hook.
"""
