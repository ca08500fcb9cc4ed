"""A server process over the tiny random llama, for the tests of the server: `python serve_process.py JSON`."""

import json
import sys
from dataclasses import replace

import workbench  # noqa: F401


def main(options):
    import mlx.core as mx
    from letter_llama import make_letter_llama
    from word_llama import TemplateTokenizer, make_tiny_llama

    from workbench.apps.serve.server import serve
    from workbench.apps.serve.settings import ServeSettings
    from workbench.config import EngineConfig
    from workbench.engine.engine import Engine

    if "mlx_cache_bytes" in options:
        mx.set_cache_limit(options["mlx_cache_bytes"])
    model = make_letter_llama(options.get("template")) if options.get("letters") else make_tiny_llama()
    if "template" in options and not options.get("letters"):
        model = replace(model, tokenizer=TemplateTokenizer(options["template"]))
    if "max_position" in options:
        model = replace(model, max_position=options["max_position"])
    engine = Engine(model, EngineConfig(**options.get("engine", {})), keep_steps=options.get("keep_steps"))
    if options.get("record_to"):
        engine.trace.record_to(options["record_to"])
    for name, folder in options.get("adapters", {}).items():
        engine.add_adapter(name, folder)
    serve(engine, ServeSettings(port=0, **options.get("serve", {})))
    print("free blocks", engine.scheduler.num_free_blocks, flush=True)
    engine.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
