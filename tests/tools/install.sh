#!/bin/sh
# Install with pip so that llama.cpp runs on this processor:  install.sh PYTHON PIP-ARGUMENTS…
# Some compilers, GCC 12 among them, drop stores that AMX's tile configuration needs: their header
# says that only its first eight bytes are read. Where processor and compiler are such, the one file
# that uses tiles is compiled with every store kept (amx_stores.sh).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=$1
shift

drops_stores() {
  probe='#include <immintrin.h>
    void f() { struct { unsigned char at[64]; } t = {}; t.at[48] = 119; _tile_loadconfig(&t); }'
  kept() { echo "$probe" | ${CXX:-c++} -O3 -mamx-tile "$@" -S -x c++ - -o - 2>/dev/null | grep -q '\$119'; }
  ! kept && kept -fno-dse -fno-tree-dse
}

if grep -qsw amx_tile "${CPUINFO:-/proc/cpuinfo}" && drops_stores; then
  echo "AMX, and a compiler that drops what it needs: its file is compiled with the stores kept"
  CMAKE_ARGS="${CMAKE_ARGS:-} -DCMAKE_CXX_COMPILER_LAUNCHER='$here/amx_stores.sh' -DGGML_CCACHE=OFF"
  export CMAKE_ARGS
fi
"$python" -m pip install "$@"

# pip takes a wheel of the same version that was built before, or elsewhere: try what is installed
lives() {
  "$python" -P -c 'import sys
from specllama.backend import trial
sys.exit(trial.require(anew=True).said or None)'
}
lives && exit
echo "the wheel that pip had dies here: it is built again"
version=$("$python" -m pip freeze | grep -i '^llama.cpp.python==')
"$python" -m pip cache remove llama_cpp_python || true
"$python" -m pip install --force-reinstall --no-deps --no-binary llama-cpp-python "$version"
lives || echo "it still dies: specllama goes on without that layout, or says what to do"
