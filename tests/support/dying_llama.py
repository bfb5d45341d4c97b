"""llama.cpp with a fault: a library in front of the installed one that dies where it is told to.

``LLAMA_DIES`` says where: ``import``; ``rows``, in passes of several rows over repacked weights;
``passes``, the same in any layout; ``later``, as ``rows``, but not for the file of a trial;
``quantize``. Needs a C compiler and Linux.
"""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specllama.backend.devices import library_folder

SOURCE = r"""
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char bytes[MODEL_PARAMS]; } params_t __attribute__((aligned(8)));
typedef struct { int n; char bytes[BATCH - 4]; } batch_t __attribute__((aligned(8)));

static int repacked, tried;

static int dies(const char * where) {
    const char * told = getenv("LLAMA_DIES");
    return told && !strcmp(told, where);
}

static void * real(const char * name) {
    static void * library;
    if (!library) library = dlopen(REAL, RTLD_NOW);
    return dlsym(library, name);
}

__attribute__((constructor)) static void begin(void) { if (dies("import")) raise(SIGILL); }

void * llama_model_load_from_file(const char * path, params_t params) {
    void * (*load)(const char *, params_t) = real("llama_model_load_from_file");
    repacked = params.bytes[EXTRA];
    tried = strstr(path, "every-type") != NULL;
    return load(path, params);
}

int llama_decode(void * context, batch_t batch) {
    int (*decode)(void *, batch_t) = real("llama_decode");
    int faulty = dies("passes") || (repacked && (dies("rows") || (dies("later") && !tried)));
    if (faulty && batch.n > 1) __builtin_trap();
    return decode(context, batch);
}

unsigned llama_model_quantize(const char * from, const char * to, const void * params) {
    unsigned (*quantize)(const char *, const char *, const void *) = real("llama_model_quantize");
    if (dies("quantize")) __builtin_trap();
    return quantize(from, to, params);
}
"""


def build(folder: Path) -> Path:
    """Build it in a folder, for ``LLAMA_CPP_LIB_PATH``; skips the test where that cannot be."""
    if sys.platform != "linux" or (compiler := shutil.which("cc")) is None:
        pytest.skip("needs Linux and a C compiler")
    import llama_cpp as ll

    installed = library_folder()
    for file in installed.glob("lib*.so*"):
        if file.name != "libllama.so":
            (folder / file.name).symlink_to(file)
    real = next(installed.glob("libllama.so.?"))
    sizes = {
        "MODEL_PARAMS": ctypes.sizeof(ll.llama_model_params),
        "EXTRA": ll.llama_model_params.use_extra_bufts.offset,
        "BATCH": ctypes.sizeof(ll.llama_batch),
        "REAL": f'"{real}"',
    }
    defined = [f"-D{name}={value}" for name, value in sizes.items()]
    out = ["-o", str(folder / "libllama.so"), "-Wl,--no-as-needed", str(real)]
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", *defined, "-xc", "-", "-xnone", *out,
         f"-Wl,-rpath,{installed}", "-ldl"],
        input=SOURCE, text=True, check=True,
    )  # fmt: skip
    return folder
