"""Passes of a small model, in a process of its own: ``python trying.py MODEL LAYOUT…``.

It says each step before it begins, so that whoever started it knows which one ended it. It imports
nothing of ours, and nobody imports it: see ``trial``.
"""

import ctypes
import os
import sys

ROWS = (1, 2, 4, 32)


def main(path: str, layouts: list[str]) -> None:
    os.environ["GGML_NO_BACKTRACE"] = "1"
    say("it is imported")
    import llama_cpp as ll

    log = ll.llama_log_callback(lambda level, text, user: None)
    ll.llama_log_set(log, ctypes.c_void_p(0))
    ll.llama_backend_init()
    nothing = (ctypes.c_void_p * 1)()  # an empty list of devices: nothing is offloaded
    for layout in layouts:
        say(f"weights are loaded {layout}")
        params = ll.llama_model_default_params()
        params.n_gpu_layers = 0
        params.devices = ctypes.cast(nothing, ctypes.c_void_p).value
        params.use_extra_bufts = layout == "repacked"
        model = ll.llama_model_load_from_file(os.fsencode(path), params)
        sizes = ll.llama_context_default_params()
        sizes.n_ctx = sizes.n_batch = sizes.n_ubatch = 256
        context = ll.llama_init_from_model(model, sizes)
        for n in ROWS:
            say(f"a pass of {n} row{'s' * (n > 1)} is computed with weights {layout}")
            tokens = (ll.llama_token * n)()
            ll.llama_decode(context, ll.llama_batch_get_one(tokens, n))
            ll.llama_memory_clear(ll.llama_get_memory(context), True)
        ll.llama_free(context)
        ll.llama_model_free(model)
    say("nothing is left")


def say(step: str) -> None:
    os.write(1, f"{step}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
