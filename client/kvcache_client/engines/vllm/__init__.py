"""All that knows vLLM: the connector, plain views of its objects, its versions, and what identifies its KV.

It decides nothing about saves and loads, and none of its exceptions leaves a hook.
"""
