"""A server process over the tiny random llama, for the tests of the server: `python serve_process.py JSON`."""

import json
import sys

import workbench  # noqa: F401


def main(options):
    import mlx.core as mx
    from word_llama import make_tiny_llama

    from workbench.config import EngineConfig
    from workbench.engine.engine import Engine
    from workbench.serve.server import serve
    from workbench.serve.settings import ServeSettings

    if "mlx_cache_bytes" in options:
        mx.set_cache_limit(options["mlx_cache_bytes"])
    engine = Engine(make_tiny_llama(), EngineConfig(**options.get("engine", {})), keep_steps=options.get("keep_steps"))
    serve(engine, ServeSettings(port=0, **options.get("serve", {})))
    print("free blocks", engine.scheduler.num_free_blocks, flush=True)
    engine.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
