// The activations of moefuse/ops/activations.py, in its order. A NaN passes through every one of them.
namespace {

enum Activation { SILU, GELU, GELU_TANH, RELU, RELU2, SIGMOID, TANH, IDENTITY, SWIGLU_OAI, SILU_CLAMP };

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

}  // namespace
