#!/usr/bin/env bash
# Builds Mesa's compiler for Apple's GPUs (G13: M1 and M2) from Debian's source package, in $MLXKV_AGX. Nothing is
# installed. About 700 MB of disk and 12 minutes of two cores, once; a second call goes on where one stopped.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
AGX=${MLXKV_AGX:-$HOME/.cache/mlxkv-agx}
LLVM=15 SUITE=trixie VERSION=25.0.7
say() { echo "[agx] $(date +%H:%M:%S) $*"; }
mkdir -p "$AGX"
cd "$AGX"

if [ ! -e clang/unpacked ]; then
  say "1 of 5: clang and its SPIR-V writer, unpacked"
  mkdir -p debs && cd debs
  apt-get -q -o APT::Sandbox::User=root download clang-$LLVM libclang-cpp$LLVM libclang-common-$LLVM-dev \
    llvm-spirv-$LLVM libllvmspirvlib$LLVM libllvm$LLVM
  cd .. && for deb in debs/*.deb; do dpkg -x "$deb" clang; done
  touch clang/unpacked
fi

if [ ! -e src/unpacked ]; then
  say "2 of 5: Mesa $VERSION's source"
  mkdir -p apt/lists/partial apt/cache/archives/partial src
  # The archive that this machine uses, its sources of another suite, in lists of their own.
  archive=$(apt-get indextargets --format '$(REPO_URI)' 'Label: Debian' | head -1)
  keys=/usr/share/keyrings/debian-archive-keyring.gpg
  echo "deb-src [signed-by=$keys] $archive $SUITE main" > apt/sources.list
  apt="apt-get -q -o APT::Sandbox::User=root -o Dir::Etc::SourceList=$AGX/apt/sources.list -o Dir::Etc::SourceParts=/dev/null
    -o Dir::State::Lists=$AGX/apt/lists -o Dir::Cache=$AGX/apt/cache"
  $apt update
  $apt source --download-only mesa
  tar -xJf mesa_$VERSION.orig.tar.xz -C src --strip-components=1
  touch src/unpacked
fi

if [ ! -x python/bin/meson ]; then
  python3 -m venv python
  python/bin/pip --quiet --disable-pip-version-check install meson mako packaging pyyaml ninja
fi
PATH=$AGX/python/bin:$AGX/stubs:$PATH

S=$AGX/src B=$AGX/build
if [ ! -e build/build.ninja ]; then
  say "3 of 5: configured"
  mkdir -p stubs
  # Mesa's configuration asks for these; nothing here calls them.
  for tool in mesa_clc vtn_bindgen bison flex; do
    printf '#!/bin/sh\necho "%s 3.8.2"\n' $tool > stubs/$tool && chmod +x stubs/$tool
  done
  printf 'Name: libdrm\nDescription: none\nVersion: 2.4.200\n' > stubs/libdrm.pc
  off=disabled
  CFLAGS=-g0 CXXFLAGS=-g0 PKG_CONFIG_PATH=$AGX/stubs meson setup "$B" "$S" -Dplatforms= -Dvulkan-drivers=asahi -Dgallium-drivers= -Dllvm=$off \
    -Dmesa-clc=system -Dopengl=false -Dgles1=$off -Dgles2=$off -Degl=$off -Dgbm=$off -Dglx=$off -Dshader-cache=$off \
    -Dzstd=$off -Dxmlconfig=$off -Dvideo-codecs= > configured.log 2>&1 || {
    tail -20 configured.log; rm -rf build; exit 1; }
fi

if [ compile -nt "$HERE"/tool.c ] && [ compile -nt "$HERE"/build.sh ]; then exit; fi
say "4 of 5: Mesa's libraries (ten minutes)"
libraries="src/compiler/spirv/libvtn.a src/compiler/nir/libnir.a src/compiler/libcompiler.a src/util/libmesa_util.a
  src/util/libmesa_util_sse41.a src/c11/impl/libmesa_util_c11.a src/util/blake3/libblake3.a"
ninja -C "$B" --quiet $libraries

say "5 of 5: the compiler"
mkdir -p made objects
for name in agx_opcodes.h agx_opcodes.c agx_builder.h; do python "$S/src/asahi/compiler/$name.py" > made/$name; done
python "$S/src/asahi/compiler/agx_nir_algebraic.py" -p "$S/src/compiler/nir" > made/agx_nir_algebraic.c
(cd "$S/src/asahi/genxml" && python gen_pack.py cmdbuf.xml agx_pack_header.h) > made/agx_pack.h
cp "$HERE/libagx.h" made/
# Arrays in registers stay in scratch memory without this pass once more. And a shuffle by xor is an instruction of these
# GPUs, which Mesa encodes but does not use.
xor='agx_shuffle_xor_to(b, dst, agx_src_index(\&instr->src[0]), agx_immediate(nir_src_as_uint(instr->src[1])))'
sed -e '/nir_lower_indirect_derefs, nir_var_function_temp/a NIR_PASS(_, nir, nir_lower_vars_to_ssa);' \
  -e "/case nir_intrinsic_quad_swap_horizontal/i case nir_intrinsic_shuffle_xor: return $xor;" \
  "$S/src/asahi/compiler/agx_compile.c" > made/agx_compile.c
sed 's/lower_relative_shuffle = true/lower_relative_shuffle = false/' \
  "$S/src/asahi/compiler/agx_nir_lower_subgroups.c" > made/agx_nir_lower_subgroups.c
command=$(ninja -C "$B" -t commands src/compiler/nir/libnir.a | grep 'nir_opt_dce.c$' | sed 's/ -MD .*//; s/-Wall//; s/-std=c11/-std=gnu11 -w/')
for folder in asahi/compiler asahi asahi/clc asahi/layout asahi/libagx asahi/genxml compiler/nir compiler/spirv util; do
  command="$command -I$S/src/$folder"
done
# The texts say which loops are unrolled, and clang has done so.
command="$command -Dnir_opt_loop_unroll=agx_loops_stay"
export command="$command -I$B/src/compiler/nir -I$AGX/made -fvisibility=default" AGX B
compile() { (cd "$B" && eval "$command -c -o $AGX/objects/$(basename "$1" .c).o $1"); }
export -f compile
{ ls "$S"/src/asahi/compiler/*.c | grep -v 'agx_compile.c\|agx_nir_lower_subgroups.c'; ls "$AGX"/made/*.c "$HERE"/tool.c; } |
  xargs -P2 -I{} bash -ec 'compile {}'
(cd "$B" && g++ -o "$AGX/compile" "$AGX"/objects/*.o $libraries -lz -lm -lpthread -ldl)
say "built: $AGX/compile"
