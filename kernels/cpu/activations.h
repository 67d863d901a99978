// The activations of moefuse/ops/meaning/activations.py, in its order. A NaN passes through every one of them.
namespace {

enum Activation { SILU, GELU, GELU_TANH, RELU, RELU2, SIGMOID, TANH, IDENTITY, SWIGLU_OAI, SILU_CLAMP, MISH };

template <class A> inline A sigmoid(A v) { return A(1) / (A(1) + std::exp(-v)); }
template <class A> inline A at_most(A v, A limit) { return v > limit ? limit : v; }
template <class A> inline A at_least(A v, A limit) { return v < limit ? limit : v; }

template <class A> inline A pointwise(int activation, A v) {
  switch (activation) {
    case SILU: return v / (A(1) + std::exp(-v));
    case GELU: return A(0.5) * v * (A(1) + std::erf(v * A(M_SQRT1_2)));
    case GELU_TANH: return A(0.5) * v * (A(1) + std::tanh(A(M_SQRT2 * M_2_SQRTPI * 0.5) * (v + A(0.044715) * v * v * v)));
    case RELU: return at_least(v, A(0));
    case RELU2: { A r = at_least(v, A(0)); return r * r; }
    case SIGMOID: return sigmoid(v);
    case TANH: return std::tanh(v);
    case MISH: { A n = std::exp(at_most(v, A(40))), w = n * (n + A(2)); return v * (w / (w + A(2))); }  // tanh(log(1 + n))
    default: return v;
  }
}

template <class A> inline A gated(int activation, A gate, A up, A first, A second) {
  if (activation == SWIGLU_OAI) {
    A g = at_most(gate, second), u = at_least(at_most(up, second), -second);
    return g * sigmoid(g * first) * (u + A(1));
  }
  if (activation == SILU_CLAMP) return pointwise(SILU, at_most(gate, first)) * at_least(at_most(up, first), -first);
  return pointwise(activation, gate) * up;
}

// The same on vectors of float, with an exponential of about one unit in the last place; results do not depend on the lane.
typedef int32_t VecI __attribute__((vector_size(BYTES)));

inline VecF lanes(float v) { return VecF{} + v; }
inline VecF power_of_two(VecI n) {
  VecI bits = (n + 127) << 23;
  VecF v;
  std::memcpy(&v, &bits, BYTES);
  return v;
}
inline VecF exp(VecF v) {
  VecF x = v > lanes(89.f) ? lanes(89.f) : v;
  x = x < lanes(-104.f) ? lanes(-104.f) : x;
  VecF t = x * 1.44269504088896341f;
  VecI n = __builtin_convertvector(t + (t < lanes(0.f) ? lanes(-0.5f) : lanes(0.5f)), VecI);
  n = x == x ? n : VecI{};
  VecF whole = __builtin_convertvector(n, VecF);
  x -= whole * 0.693359375f;
  x += whole * 2.12194440e-4f;
  VecF p = lanes(1.9875691500e-4f);
  p = p * x + 1.3981999507e-3f;
  p = p * x + 8.3334519073e-3f;
  p = p * x + 4.1665795894e-2f;
  p = p * x + 1.6666665459e-1f;
  p = p * x + 5.0000001201e-1f;
  VecI half = n >> 1;
  return (p * (x * x) + x + 1.f) * power_of_two(half) * power_of_two(n - half);
}
inline VecF sigmoid(VecF v) { return 1.f / (1.f + exp(-v)); }
inline VecF at_most(VecF v, float limit) { return v > lanes(limit) ? lanes(limit) : v; }
inline VecF at_least(VecF v, float limit) { return v < lanes(limit) ? lanes(limit) : v; }
inline VecF tanh(VecF v) {
  VecF z = v * v, p = lanes(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  VecF small = p * z * v + v, x = v < lanes(0.f) ? -v : v, large = 1.f - 2.f / (exp(x + x) + 1.f);
  return z < lanes(0.390625f) ? small : v < lanes(0.f) ? -large : large;
}
// The share of a normal distribution below v, 0.5 * (1 + erf(v / sqrt(2))). Near zero erf is a polynomial as exact as floats are. Elsewhere
// 1 - erf is that of Numerical Recipes, relative error 1.2e-7, from which the lower tail is taken without a difference of near equals.
inline VecF below(VecF v) {
  VecF x = v * float(M_SQRT1_2), z = x * x, q = lanes(7.853861353e-5f);
  q = q * z - 8.010193625e-4f;
  q = q * z + 5.188327686e-3f;
  q = q * z - 2.685381194e-2f;
  q = q * z + 1.128358515e-1f;
  q = q * z - 3.761262582e-1f;
  q = q * z + 1.128379166f;
  VecF t = 1.f / (1.f + (v < lanes(0.f) ? -x : x) * 0.5f), p = lanes(0.17087277f);
  p = p * t - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  VecF tail = 0.5f * t * exp(p - z);
  return z < lanes(1.f) ? 0.5f + 0.5f * x * q : v < lanes(0.f) ? tail : 1.f - tail;
}

inline VecF pointwise(int activation, VecF v) {
  switch (activation) {
    case SILU: return v / (1.f + exp(-v));
    case GELU: return v * below(v);
    case GELU_TANH: return v / (1.f + exp(float(-M_SQRT2 * M_2_SQRTPI) * (v + 0.044715f * v * v * v)));
    case RELU: return at_least(v, 0.f);
    case RELU2: { VecF r = at_least(v, 0.f); return r * r; }
    case SIGMOID: return sigmoid(v);
    case TANH: return tanh(v);
    case MISH: { VecF n = exp(at_most(v, 40.f)), w = n * (n + 2.f); return v * (w / (w + 2.f)); }
    default: return v;
  }
}

inline VecF gated(int activation, VecF gate, VecF up, float first, float second) {
  if (activation == SWIGLU_OAI) {
    VecF g = at_most(gate, second), u = at_least(at_most(up, second), -second);
    return g * sigmoid(g * first) * (u + 1.f);
  }
  if (activation == SILU_CLAMP) return pointwise(SILU, at_most(gate, first)) * at_least(at_most(up, first), -first);
  return pointwise(activation, gate) * up;
}

// n results from gate[i * step] and up[i * step] (no gate: up is null), each rounded to D. D says what float stands for.
template <class D> void activate(int activation, const double* gate, const double* up, int64_t step, int64_t n, double first, double second, double* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = up ? gated(activation, gate[i * step], up[i * step], first, second) : pointwise(activation, gate[i * step]);
}
template <class D> void activate(int activation, const float* gate, const float* up, int64_t step, int64_t n, float first, float second, float* to) {
  constexpr int W = WIDTH<float>;
  for (int64_t i = 0; i < n; i += W) {
    int64_t count = std::min<int64_t>(W, n - i);
    VecF g, u = {};
    if (count == W && step == 1) {
      g = load(gate + i);
      if (up) u = load(up + i);
    } else {
      float part[2][W] = {};
      for (int64_t l = 0; l < count; ++l) {
        part[0][l] = gate[(i + l) * step];
        if (up) part[1][l] = up[(i + l) * step];
      }
      g = load(part[0]);
      u = load(part[1]);
    }
    VecF v = rounded_lanes(up ? gated(activation, g, u, first, second) : pointwise(activation, g), static_cast<D*>(nullptr));
    if (count == W) store<float>(to + i, v);
    else std::memcpy(to + i, &v, size_t(count) * sizeof(float));
  }
}

}  // namespace
