// Which ISA variants this CPU (and the operating system's register saving, which the builtins check too) can run.
#include "base/kernel_table.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace quire {

namespace portable {
extern const KernelTable table;
}
#if defined(__x86_64__)
namespace amx {
extern const KernelTable table;
}
#if !defined(QUIRE_EMULATE_AMX)  // else the only variants are that one and the portable one
namespace avx512_bf16 {
extern const KernelTable table;
}
namespace avx512_vnni {
extern const KernelTable table;
}
namespace avx512 {
extern const KernelTable table;
}
namespace avx_vnni {
extern const KernelTable table;
}
namespace avx2 {
extern const KernelTable table;
}
#endif
#elif defined(__aarch64__)
namespace neon {
extern const KernelTable table;
}
namespace neon_dot {
extern const KernelTable table;
}
namespace neon_i8mm {
extern const KernelTable table;
}
#if defined(QUIRE_HAS_SVE)
namespace sve256 {
extern const KernelTable table;
}
#endif
#endif

namespace {

#if defined(__x86_64__)
// Whether the processor has tiles of bf16 and int8, and the kernel lets this process use them: threads have room for
// tiles only after they were asked for (https://docs.kernel.org/arch/x86/xstate.html).
bool can_use_amx() {
#if defined(QUIRE_EMULATE_AMX)
  return true;
#elif defined(__linux__)
  constexpr unsigned kBFloat = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  const unsigned needed = kBFloat | kTile | kInt8;
  return (d & needed) == needed && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

#if defined(__aarch64__)
// Whether the processor has what the variants need beyond NEON, as the operating system says.
struct ArmFeatures {
  bool has_dot = false, has_i8mm = false, has_bf16 = false, has_sve256 = false;

  ArmFeatures() {
#if defined(__linux__)
    // the numbers of https://docs.kernel.org/arch/arm64/elf_hwcaps.html, which older headers lack
    constexpr unsigned long kDotProduct = 1ul << 20, kI8mm = 1ul << 13, kBf16 = 1ul << 14;
    const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
    has_dot = (first & kDotProduct) != 0;
    has_i8mm = (second & kI8mm) != 0;
    has_bf16 = (second & kBf16) != 0;
    // SVE with the same products, and vectors of 256 bits (PR_SVE_GET_VL: bytes, below flags).
    constexpr unsigned long kSve = 1ul << 22, kSveI8mm = 1ul << 9, kSveBf16 = 1ul << 12;
    const bool has_sve = (first & kSve) != 0 && (second & kSveI8mm) != 0 && (second & kSveBf16) != 0;
    constexpr int kGetVectorLength = 51;
    has_sve256 = has_sve && (prctl(kGetVectorLength) & 0xffff) == 32;
#elif defined(__APPLE__)
    has_dot = has("hw.optional.arm.FEAT_DotProd");
    has_i8mm = has("hw.optional.arm.FEAT_I8MM");
    has_bf16 = has("hw.optional.arm.FEAT_BF16");
#endif
  }

#if defined(__APPLE__)
 private:
  static bool has(const char* name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
  }
#endif
};
#endif

struct Variant {
  const KernelTable* table;
  bool supported;
};

struct Variants {
  static constexpr int kCount = 7;
  Variant best_first[kCount] = {};
  const KernelTable* active = nullptr;

  Variants() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool has_avx512_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
    const bool has_avx512_bf16 = has_avx512_vnni && __builtin_cpu_supports("avx512bf16");
    best_first[0] = {&amx::table, has_avx512_bf16 && can_use_amx()};
#if !defined(QUIRE_EMULATE_AMX)
    best_first[1] = {&avx512_bf16::table, has_avx512_bf16};
    best_first[2] = {&avx512_vnni::table, has_avx512_vnni};
    best_first[3] = {&avx512::table, has_avx512};
    best_first[4] = {&avx_vnni::table, has_avx2 && __builtin_cpu_supports("avxvnni")};
    best_first[5] = {&avx2::table, has_avx2};
#endif
#elif defined(__aarch64__)
    const ArmFeatures features;
#if defined(QUIRE_HAS_SVE)
    best_first[0] = {&sve256::table, features.has_sve256};
#endif
    best_first[1] = {&neon_i8mm::table, features.has_dot && features.has_i8mm && features.has_bf16};
    best_first[2] = {&neon_dot::table, features.has_dot};
    best_first[3] = {&neon::table, true};
#endif
    best_first[6] = {&portable::table, true};
    for (const Variant& variant : best_first) {
      if (variant.supported && active == nullptr) active = variant.table;
    }
  }
};

Variants& variants() {
  static Variants instance;
  return instance;
}

}  // namespace

const KernelTable& kernels() { return *variants().active; }

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Variant& variant : variants().best_first) {
    if (variant.supported) names.push_back(variant.table->name);
  }
  return names;
}

bool use_isa(const std::string& name) {
  for (const Variant& variant : variants().best_first) {
    if (variant.supported && name == variant.table->name) {
      variants().active = variant.table;
      return true;
    }
  }
  return false;
}

}  // namespace quire
