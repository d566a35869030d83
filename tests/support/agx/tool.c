// SPIR-V -> code of an M1 or M2, with what it takes: Mesa's own offline compiler (asahi_clc), but for what it prints, and
// with kernels that may spill.
#define main mesa_main
#include "asahi_clc.c"
#undef main

bool agx_loops_stay(nir_shader* nir) {
  return false;
}

int main(int argc, char** argv) {
  FILE* file = argc > 1 ? fopen(argv[1], "rb") : NULL;
  if (!file) {
    fprintf(stderr, "usage: %s SPIRV\n", argv[0]);
    return 1;
  }
  fseek(file, 0, SEEK_END);
  const size_t bytes = ftell(file);
  uint32_t* words = malloc(bytes);
  rewind(file);
  if (fread(words, 1, bytes, file) != bytes) return 1;
  glsl_type_singleton_init_or_ref();
  nir_shader* nir = compile(ralloc_context(NULL), words, bytes);
  const struct nir_precomp_opts options = {.arg_align_B = 2};
  nir_foreach_entrypoint(function, nir) {
    const struct nir_precomp_layout layout = nir_precomp_derive_layout(&options, function);
    nir_shader* s =
        nir_precompiled_build_variant(function, 0, &agx_nir_options, &options, load_kernel_input);
    agx_link_libagx(s, nir);
    NIR_PASS(_, s, nir_lower_vars_to_explicit_types, nir_var_mem_shared, glsl_get_cl_type_size_align);
    NIR_PASS(_, s, nir_lower_explicit_io, nir_var_mem_shared, nir_address_format_62bit_generic);
    bool progress;
    do {
      progress = false;
      NIR_PASS(progress, s, nir_opt_loop);
    } while (progress);
    agx_preprocess_nir(s, NULL);
    struct agx_shader_part made;
    struct agx_shader_key key = {
        .libagx = nir,
        .promote_constants = true,
        .has_scratch = true,
        .dev.needs_g13x_coherency = U_TRISTATE_NO,
        .reserved_preamble = layout.size_B / 2,
    };
    agx_compile_shader_nir(s, &key, NULL, &made);
    printf("\nTAKES registers=%u scratch=%u shared=%u code=%u threads=%u\n", made.info.nr_gprs,
           made.info.scratch_size, made.info.local_size, made.info.binary_size,
           agx_occupancy_for_register_count(made.info.nr_gprs).max_threads);
  }
  return 0;
}
