#!/bin/sh
# kernels_alone.sh: build and run kernels_alone.cpp
set -eu
here=$(cd "$(dirname "$0")" && pwd)
source=$here/../../specllama/kernels
out=$(mktemp -d)
trap 'rm -r "$out"' EXIT
flags="-std=c++17 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -Wno-psabi -pthread -I$source"
for unit in product attention pack all avx2:"-mavx2 -mfma -mf16c" avxvnni:"-mavx2 -mfma -mf16c -mavxvnni" \
    avx512:"-mavx512f -mavx512bw -mavx512vl -mavx512vnni -mfma -mf16c"; do
  name=${unit%%:*} more=${unit#"$name"}
  ${CXX:-c++} $flags ${more#:} -DHAVE_AVX2 -DHAVE_AVXVNNI -DHAVE_AVX512 -c "$source/$name.cpp" -o "$out/$name.o"
done
${CXX:-c++} $flags "$here/kernels_alone.cpp" "$out"/*.o -o "$out/alone"
"$out/alone"
