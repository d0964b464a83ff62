"""vLLM: its connector, its settings, its versions, and what identifies its KV.

It decides nothing about saves and loads, and no exception of it leaves a hook.
"""
