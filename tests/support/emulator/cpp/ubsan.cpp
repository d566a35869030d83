// The functions that code compiled with -fsanitize=undefined calls; each is a fault.
#include "state.h"

namespace {

struct Place {
  const char* file;
  unsigned line, column;
};
struct TypeMismatch {
  Place at;
  const void* type;
  unsigned char log_align, kind;
};

[[noreturn]] void undefined(const char* kind, const std::string& message, const Place& at,
                            void* pc) {
  emu::Fault fault{kind, message};
  fault.pc = pc;
  fault.file = at.file, fault.line = at.line, fault.column = at.column;
  emu::report(fault);
}

}  // namespace

// The first member of every data block is the place in the source.
#define EMU_UNDEFINED(name, kind, message)                        \
  extern "C" void __ubsan_handle_##name(Place* at, ...) {         \
    undefined(kind, message, *at, __builtin_return_address(0));   \
  }                                                               \
  extern "C" void __ubsan_handle_##name##_abort(Place* at, ...) { \
    undefined(kind, message, *at, __builtin_return_address(0));   \
  }
EMU_UNDEFINED(out_of_bounds, "array-index", "index outside the array")
EMU_UNDEFINED(shift_out_of_bounds, "shift", "shift by a negative number, or by the width or more")
EMU_UNDEFINED(float_cast_overflow, "float-to-int", "the float does not fit the integer type")
EMU_UNDEFINED(add_overflow, "integer-overflow", "signed addition overflows")
EMU_UNDEFINED(sub_overflow, "integer-overflow", "signed subtraction overflows")
EMU_UNDEFINED(mul_overflow, "integer-overflow", "signed multiplication overflows")
EMU_UNDEFINED(negate_overflow, "integer-overflow", "signed negation overflows")
EMU_UNDEFINED(divrem_overflow, "divide", "integer division by zero, or overflow")
EMU_UNDEFINED(pointer_overflow, "out-of-bounds", "pointer arithmetic wraps around")
EMU_UNDEFINED(load_invalid_value, "invalid-value", "a bool that is neither true nor false")
EMU_UNDEFINED(vla_bound_not_positive, "array-index", "array of variable length")
EMU_UNDEFINED(builtin_unreachable, "undefined", "unreachable code is reached")
EMU_UNDEFINED(missing_return, "undefined", "a function ends without its return value")
EMU_UNDEFINED(nonnull_arg, "null", "null pointer")
EMU_UNDEFINED(nonnull_return_v1, "null", "null pointer")
EMU_UNDEFINED(invalid_builtin, "undefined", "clz or ctz of zero")

static void mismatch(TypeMismatch* data, uintptr_t address, void* pc) {
  unsigned align = 1u << data->log_align;
  if (!address) undefined("null", "null pointer", data->at, pc);
  if (address % align) {
    undefined("misaligned", emu::text("an address that is no multiple of %u", align), data->at, pc);
  }
  undefined("out-of-bounds", "object too small for its type", data->at, pc);
}
extern "C" void __ubsan_handle_type_mismatch_v1(TypeMismatch* data, uintptr_t address) {
  mismatch(data, address, __builtin_return_address(0));
}
extern "C" void __ubsan_handle_type_mismatch_v1_abort(TypeMismatch* data, uintptr_t address) {
  mismatch(data, address, __builtin_return_address(0));
}
