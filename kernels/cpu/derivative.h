// Derivatives of the activations, as in the table of moefuse/ops/meaning/activations.py, on vectors of float.
namespace {

// The derivative of one value: a gradient times `slope`, and zero where the function is `off`, whatever the gradient is there.
struct Slope {
  VecF value, slope;
  VecI off = {};
  VecF times(VecF grad) const { return off ? VecF{} : grad * slope; }
};

inline VecF ones() { return lanes(1.f); }
inline VecF where(VecI mask, VecF v) { return mask ? v : VecF{}; }

inline Slope with_slope(int activation, VecF v) {
  switch (activation) {
    case SILU: { VecF s = sigmoid(v); return {v * s, s * (1.f + v * (1.f - s))}; }
    case GELU: {
      VecF area = below(v);
      return {v * area, area + v * exp(-0.5f * v * v) * float(M_2_SQRTPI * M_SQRT1_2 * 0.5)};
    }
    case GELU_TANH: {
      constexpr float scale = float(M_SQRT2 * M_2_SQRTPI);
      VecF s = sigmoid(scale * (v + 0.044715f * v * v * v));
      return {v * s, s + v * s * (1.f - s) * scale * (1.f + 0.134145f * v * v)};
    }
    case RELU: return {at_least(v, 0.f), ones(), v <= lanes(0.f)};
    case RELU2: { VecF r = at_least(v, 0.f); return {r * r, 2.f * r, v <= lanes(0.f)}; }
    case SIGMOID: { VecF s = sigmoid(v); return {s, s * (1.f - s)}; }
    case TANH: { VecF t = tanh(v); return {t, 1.f - t * t}; }
    case MISH: {
      VecF n = exp(at_most(v, 40.f)), w = n * (n + 2.f), t = w / (w + 2.f);
      return {v * t, t + v * (1.f - t * t) * sigmoid(v)};
    }
    default: return {v, ones()};
  }
}

// The activation's value, and the gradients of gate and up for the gradient `grad` of that value.
struct Gradients { VecF value, gate, up; };

inline VecI inside(VecF v, float limit) { return LIMITS_PASS ? v <= lanes(limit) : v < lanes(limit); }

inline Gradients gated_gradients(int activation, VecF grad, VecF gate, VecF up, float first, float second) {
  if (activation != SWIGLU_OAI && activation != SILU_CLAMP) {
    Slope f = with_slope(activation, gate);
    return {f.value * up, f.times(grad * up), grad * f.value};
  }
  const float limit = activation == SWIGLU_OAI ? second : first;
  VecF g = at_most(gate, limit), u = at_least(at_most(up, limit), -limit);
  VecI gate_passes = inside(gate, limit), up_passes = inside(up, limit) && inside(-up, limit);
  if (activation == SILU_CLAMP) {
    Slope f = with_slope(SILU, g);
    return {f.value * u, where(gate_passes, f.times(grad * u)), where(up_passes, grad * f.value)};
  }
  VecF s = sigmoid(g * first), shifted = u + 1.f;
  return {g * s * shifted, where(gate_passes, grad * shifted * s * (1.f + first * g * (1.f - s))), where(up_passes, grad * g * s)};
}

inline Gradients gradients(int activation, VecF grad, VecF gate, const VecF* up, float first, float second) {
  if (up) return gated_gradients(activation, grad, gate, *up, first, second);
  Slope f = with_slope(activation, gate);
  return {f.value, f.times(grad), VecF{}};
}

}  // namespace
