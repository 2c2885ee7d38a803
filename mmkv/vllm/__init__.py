"""Compressed KV caches with sizes of their own per head, inside unforked vLLM.

A plugin of vLLM's (`vllm.general_plugins`), which `--additional-config '{"mmkv": {...}}'` turns on;
without it nothing changes. mmkv itself never imports this package. A layer's KV heads are cut into
classes. With a budget in tokens, heads that keep the whole prompt are vLLM's own `Attention`; all
other heads of a layer are one module, whose attention is plain torch, and whose blocks are freed
when a prompt has been compressed. With one in bytes, that module has all heads, and the blocks that
stay hold pairs in 8 bits.
"""

from __future__ import annotations


def register() -> None:
    """Hook vLLM: the entry point, called once in each of its processes."""
    from mmkv.vllm import options

    options.register()
    if options.supported():
        from mmkv.vllm import attention, batch, blocks

        blocks.register()
        batch.register()
        attention.register()
