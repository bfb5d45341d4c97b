#!/bin/sh
# Runs a compiler; llama.cpp's file for AMX is compiled with every store kept. See install.sh.
case " $* " in
  *ggml-cpu/amx/mmq.cpp*) exec "$@" -fno-dse -fno-tree-dse ;;
esac
exec "$@"
