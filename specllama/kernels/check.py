"""A check of the kernels, in a process of its own: ``python -m specllama.kernels.check``.

It logs each step before it begins, and ends with "alike": whoever started it knows which step ended
it (``backend/trial.py``).
"""

from specllama import kernels


def main() -> None:
    """Compare the kernels with their scalar reference, through llama.cpp's own graphs, and log."""
    print("they are loaded", flush=True)
    found = kernels.install()
    if not found.name:
        print(f"none: {found.why}", flush=True)
        return
    same = kernels.library().specllama_kernels_check(kernels.handle()) == 0
    print(f"alike: {found.name}" if same else "different: the last one", flush=True)


if __name__ == "__main__":
    main()
