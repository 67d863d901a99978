// Storage dtypes, vectors of the accumulation dtype, and rounding to storage.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>
#include <omp.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64, ACCUMULATORS = 16;
#elif defined(__AVX__)
constexpr int BYTES = 32, ACCUMULATORS = 8;
#else
constexpr int BYTES = 16, ACCUMULATORS = 8;
#endif
#if defined(__F16C__)
constexpr bool HAS_F16 = true;
#else
constexpr bool HAS_F16 = false;
#endif

struct BF16 { uint16_t bits; };
struct F16 { uint16_t bits; };

typedef float VecF __attribute__((vector_size(BYTES)));
typedef double VecD __attribute__((vector_size(BYTES)));
typedef uint32_t VecU __attribute__((vector_size(BYTES)));
typedef uint16_t HalfU __attribute__((vector_size(BYTES / 2)));

template <class A> struct VecOf;
template <> struct VecOf<float> { using type = VecF; };
template <> struct VecOf<double> { using type = VecD; };
template <class A> using Vec = typename VecOf<A>::type;
template <class A> constexpr int WIDTH = BYTES / int(sizeof(A));

template <class D> struct AccOf { using type = float; };
template <> struct AccOf<double> { using type = double; };
template <class D> using Acc = typename AccOf<D>::type;

inline VecF load(const float* p) { VecF v; std::memcpy(&v, p, BYTES); return v; }
inline VecD load(const double* p) { VecD v; std::memcpy(&v, p, BYTES); return v; }
inline VecF load(const BF16* p) {
  HalfU half;
  std::memcpy(&half, p, BYTES / 2);
  VecU wide = __builtin_convertvector(half, VecU) << 16;
  VecF v;
  std::memcpy(&v, &wide, BYTES);
  return v;
}
inline VecF load(const F16* p) {
#if defined(__AVX512F__)
  return (VecF)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (VecF)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  return VecF{};
#endif
}
template <class A> inline void store(A* p, Vec<A> v) { std::memcpy(p, &v, BYTES); }

inline float widen(float v) { return v; }
inline double widen(double v) { return v; }
inline float widen(BF16 v) {
  uint32_t bits = uint32_t(v.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
inline float widen(F16 v) {
#if defined(__F16C__)
  return _cvtsh_ss(v.bits);
#else
  return 0;
#endif
}

template <class D> inline D narrow(Acc<D> v);
template <> inline float narrow<float>(float v) { return v; }
template <> inline double narrow<double>(double v) { return v; }
template <> inline BF16 narrow<BF16>(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return BF16{0x7fc0};
  return BF16{uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};
}
template <> inline F16 narrow<F16>(float v) {
#if defined(__F16C__)
  return F16{uint16_t(_cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT))};
#else
  return F16{0};
#endif
}
// The value that storage dtype D keeps of v.
template <class D> inline Acc<D> rounded(Acc<D> v) { return widen(narrow<D>(v)); }

inline VecF rounded_lanes(VecF v, float*) { return v; }
inline VecD rounded_lanes(VecD v, double*) { return v; }
inline void store_lanes(float* p, VecF v) { store<float>(p, v); }
inline void store_lanes(double* p, VecD v) { store<double>(p, v); }
inline VecU bf16_bits(VecF v) {
  VecU bits;
  std::memcpy(&bits, &v, BYTES);
  return v == v ? (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16 : VecU{} + 0x7fc0u;
}
inline VecF rounded_lanes(VecF v, BF16*) {
  VecU wide = bf16_bits(v) << 16;
  std::memcpy(&v, &wide, BYTES);
  return v;
}
inline void store_lanes(BF16* p, VecF v) {
  HalfU half = __builtin_convertvector(bf16_bits(v), HalfU);
  std::memcpy(p, &half, BYTES / 2);
}
inline void store_lanes(F16* p, VecF v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#endif
}
inline VecF rounded_lanes(VecF v, F16*) {
  F16 half[BYTES / 4];
  store_lanes(half, v);
  return load(half);
}
template <class T, class V> inline void store_lanes(T* p, V v) {  // between float and double
  for (int i = 0; i < int(sizeof(V) / sizeof(v[0])); ++i) p[i] = narrow<T>(Acc<T>(v[i]));
}

// a * b + c with one rounding where the CPU has the instruction. Left to the compiler, which product of a sum is contracted may depend on
// how a loop was unrolled, and so on the number of rows.
#if defined(__FMA__)
inline float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double multiply_add(double a, double b, double c) { return __builtin_fma(a, b, c); }
#if defined(__AVX512F__)
inline VecF multiply_add(VecF a, VecF b, VecF c) { return (VecF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline VecD multiply_add(VecD a, VecD b, VecD c) { return (VecD)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c); }
#else
inline VecF multiply_add(VecF a, VecF b, VecF c) { return (VecF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline VecD multiply_add(VecD a, VecD b, VecD c) { return (VecD)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c); }
#endif
#else
template <class A> inline A multiply_add(A a, A b, A c) { return a * b + c; }
#endif

// Sum of the lanes, always in the same order.
template <class A> inline A lanes_sum(Vec<A> v) {
  A part[WIDTH<A>];
  std::memcpy(part, &v, BYTES);
  for (int half = WIDTH<A> / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) part[i] += part[i + half];
  return part[0];
}
#if defined(__AVX512F__)
template <> inline float lanes_sum<float>(VecF v) { return _mm512_reduce_add_ps((__m512)v); }
template <> inline double lanes_sum<double>(VecD v) { return _mm512_reduce_add_pd((__m512d)v); }
#elif defined(__AVX__)
template <> inline float lanes_sum<float>(VecF v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
#endif

}  // namespace
