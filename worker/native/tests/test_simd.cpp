// F16 of one set, lane by lane against plain floats: of the baseline, or compiled with a set's flags and
// -DPAGECAST_SET=avx2 -DPAGECAST_SIMD='"../src/simd/avx2.h"' of that one. Says so and passes where the
// machine lacks the set.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>

#include PAGECAST_SIMD

#include "../src/simd.h"
#include "check.h"
#include "matrix.h"
#include "sets.h"

#define PAGECAST_STRING_(name) #name
#define PAGECAST_STRING(name) PAGECAST_STRING_(name)

namespace pagecast::PAGECAST_SET {
namespace {

struct Lanes {
  float at[kLanes];
  explicit Lanes(F16 v) { store(at, v); }
};

bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }

float one_exp(float x) { return Lanes(exp(broadcast(x))).at[0]; }

void test_arithmetic() {
  float a[kLanes], b[kLanes], c[kLanes];
  Random random(1);
  for (int i = 0; i < kLanes; ++i)
    a[i] = random.uniform(9), b[i] = random.uniform(9), c[i] = random.uniform(9);
  const F16 x = load(a), y = load(b), z = load(c);
  const Lanes add(x + y), sub(x - y), mul(x * y), div(x / y), mad(fma(x, y, z)), root(sqrt(x * x));
  const Lanes big(max(x, y)), small(min(x, y)), picked(select(less(x, y), z, x));
  for (int i = 0; i < kLanes; ++i) {
    CHECK(same_bits(add.at[i], a[i] + b[i]) && same_bits(sub.at[i], a[i] - b[i]), "lane %d", i);
    CHECK(same_bits(mul.at[i], a[i] * b[i]) && same_bits(div.at[i], a[i] / b[i]), "lane %d", i);
    CHECK(same_bits(mad.at[i], Native::kFused ? std::fma(a[i], b[i], c[i]) : a[i] * b[i] + c[i]), "lane %d",
          i);
    CHECK(same_bits(root.at[i], std::sqrt(a[i] * a[i])), "lane %d", i);
    CHECK(big.at[i] == std::max(a[i], b[i]) && small.at[i] == std::min(a[i], b[i]), "lane %d", i);
    CHECK(same_bits(picked.at[i], a[i] < b[i] ? c[i] : a[i]), "lane %d", i);
  }
}

void test_some_lanes() {
  float from[kLanes];
  for (int i = 0; i < kLanes; ++i) from[i] = static_cast<float>(i + 1);
  for (int n = -3; n <= kLanes + 3; ++n) {
    float guarded[kLanes];
    for (int i = 0; i < kLanes; ++i) guarded[i] = i < n ? from[i] : kNaN;
    const Lanes loaded(load_n(guarded, n)), picked(select(first_n(n), load(from), zero()));
    float stored[kLanes] = {};
    store_n(stored, load(from), n);
    for (int i = 0; i < kLanes; ++i) {
      const float expected = i < n ? from[i] : 0.0f;
      CHECK(same_bits(loaded.at[i], expected), "n %d lane %d", n, i);
      CHECK(same_bits(picked.at[i], expected), "n %d lane %d", n, i);
      CHECK(same_bits(stored[i], expected), "n %d lane %d", n, i);
    }
  }
}

void test_sum_is_a_fixed_tree() {
  Random random(2);
  for (int round = 0; round < 1000; ++round) {
    float a[kLanes], tree[kLanes], peak = -kInf;
    for (int i = 0; i < kLanes; ++i)
      tree[i] = a[i] = random.uniform(round % 2 == 0 ? 1.0f : 1e6f), peak = std::max(peak, a[i]);
    for (int half = kLanes / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) tree[i] = tree[i] + tree[i + half];
    CHECK(same_bits(sum(load(a)), tree[0]), "%g is not %g", sum(load(a)), tree[0]);
    CHECK(max_lane(load(a)) == peak, "%g is not %g", max_lane(load(a)), peak);
  }
}

void test_max_drops_a_nan_on_the_left_and_keeps_one_on_the_right() {
  CHECK(Lanes(max(broadcast(kNaN), broadcast(1))).at[3] == 1.0f, "left");
  CHECK(std::isnan(Lanes(max(broadcast(1), broadcast(kNaN))).at[3]), "right");
  CHECK(Lanes(min(broadcast(kNaN), broadcast(1))).at[3] == 1.0f, "left");
  CHECK(std::isnan(Lanes(min(broadcast(1), broadcast(kNaN))).at[3]), "right");
  CHECK(std::isnan(sum(select(first_n(1), broadcast(kNaN), zero()))), "a sum keeps it");
}

void test_exp() {
  double worst = 0;
  float worst_at = 0, before = 0;
  for (float x = -87.33f; x < 88.72284f; x += std::max(1e-5f * std::fabs(x), 1e-6f)) {
    const double exact = std::exp(static_cast<double>(x));
    const float rounded = static_cast<float>(exact);
    const double ulp = std::isinf(rounded) ? std::ldexp(1.0, 104)
                                           : std::nextafter(rounded, kInf) - static_cast<double>(rounded);
    const double error = std::fabs(one_exp(x) - exact) / (std::isinf(ulp) ? std::ldexp(1.0, 104) : ulp);
    if (!(error <= worst)) worst = error, worst_at = x;
    CHECK(one_exp(x) >= before * 0.9999999f, "falls at %.9g", x);
    before = one_exp(x);
  }
  std::printf("exp: at most %.3f ulp, at %.9g\n", worst, worst_at);
  CHECK(worst <= 2.0, "%.3f ulp at %.9g", worst, worst_at);
  CHECK(same_bits(one_exp(0.0f), 1.0f) && same_bits(one_exp(-0.0f), 1.0f), "at 0");
  for (const float x : {-87.34f, -100.0f, -1e10f, -std::numeric_limits<float>::max(), -kInf})
    CHECK(same_bits(one_exp(x), 0.0f), "%g gives %g", x, one_exp(x));
  for (const float x : {88.72284f, 89.0f, 128.0f, 1e10f, std::numeric_limits<float>::max(), kInf})
    CHECK(one_exp(x) == kInf, "%g gives %g", x, one_exp(x));
  CHECK(std::isfinite(one_exp(std::nextafter(88.72284f, 0.0f))), "the last one that is finite");
  CHECK(std::isnan(one_exp(kNaN)) && std::isnan(one_exp(-kNaN)), "NaN");
}

// What a lane holds, as words.
struct Words {
  uint32_t at[kLanes];
  explicit Words(I16 v) { store_words(at, v); }
};

void test_words() {
  Random random(3);
  uint32_t from[kLanes];
  for (int i = 0; i < kLanes; ++i)
    from[i] = static_cast<uint32_t>(random.below(int64_t{1} << 31)) * 2 + (i & 1);
  const I16 x = load_words(from), one = broadcast_word(-7);
  const Words same(x), sum(x + one), low(low_nibbles(x)), high(high_nibbles(x));
  const Words bytes[] = {Words(byte_at<0>(x)), Words(byte_at<1>(x)), Words(byte_at<2>(x)),
                         Words(byte_at<3>(x))};
  const Lanes floats(to_float(x));
  for (int i = 0; i < kLanes; ++i) {
    CHECK(same.at[i] == from[i] && sum.at[i] == from[i] - 7, "lane %d", i);
    CHECK(low.at[i] == (from[i] & 0x0f0f0f0fu) && high.at[i] == (from[i] >> 4 & 0x0f0f0f0fu), "lane %d", i);
    for (int j = 0; j < 4; ++j) CHECK(bytes[j].at[i] == (from[i] >> 8 * j & 0xff), "lane %d byte %d", i, j);
    CHECK(same_bits(floats.at[i], static_cast<float>(static_cast<int32_t>(from[i]))), "lane %d", i);
  }
}

// Every float16 by its definition, there and back, and floats between and around all of them.
void test_halves() {
  const auto value_of = [](uint32_t half) {
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    const double size = exponent == 0    ? std::ldexp(fraction, -24)
                        : exponent == 31 ? (fraction == 0 ? HUGE_VAL : std::nan(""))
                                         : std::ldexp(1024 + fraction, exponent - 25);
    return half >> 15 ? -size : size;
  };
  const auto stored = [](float x) {
    uint16_t to[kLanes];
    store_half(to, broadcast(x));
    return to[kLanes - 1];
  };
  for (uint32_t first = 0; first < 65536; first += kLanes) {
    uint16_t from[kLanes], back[kLanes];
    for (int i = 0; i < kLanes; ++i) from[i] = static_cast<uint16_t>(first + i);
    const F16 loaded = load_half(from);
    store_half(back, loaded);
    const Lanes lanes(loaded);
    for (int i = 0; i < kLanes; ++i) {
      const double value = value_of(from[i]);
      if (std::isnan(value)) {
        CHECK(std::isnan(lanes.at[i]) && (back[i] & 0x7fff) > 0x7c00, "%x", from[i]);
      } else {
        CHECK(lanes.at[i] == value && back[i] == from[i], "%x: %g, %x", from[i], lanes.at[i], back[i]);
        CHECK(std::signbit(lanes.at[i]) == (from[i] >> 15), "%x", from[i]);
      }
    }
  }
  for (uint32_t half = 0; half < 0x7c00; ++half) {
    // The largest number's next step would be 65536: what rounds to it overflows.
    const double next = half == 0x7bff ? 65536 : value_of(half + 1);
    const float middle = static_cast<float>((value_of(half) + next) / 2);
    CHECK(stored(middle) == half + (half & 1), "%x and a half: %x", half, stored(middle));
    CHECK(stored(std::nextafter(middle, 0.0f)) == half, "below %x and a half", half);
    CHECK(stored(-std::nextafter(middle, kInf)) == ((half + 1) | 0x8000), "above %x and a half", half);
  }
  CHECK(stored(1e30f) == 0x7c00 && stored(-1e30f) == 0xfc00 && stored(1e-30f) == 0, "far outside");
}

void test_bfloats() {
  for (uint32_t high = 0; high < 65536; ++high) {
    const uint16_t from[kLanes] = {0, static_cast<uint16_t>(high)};
    const Lanes lanes(load_bfloat(from));
    uint32_t bits;
    std::memcpy(&bits, &lanes.at[1], sizeof bits);
    CHECK(bits == high << 16, "%x", high);
    // Halves, and what is next to them.
    for (const uint32_t low : {0x0000u, 0x7fffu, 0x8000u, 0x8001u}) {
      float x;
      const uint32_t wide = high << 16 | low;
      std::memcpy(&x, &wide, sizeof x);
      uint16_t to[kLanes];
      store_bfloat(to, broadcast(x));
      const uint32_t up = low == 0x8001 || (low == 0x8000 && (high & 1));
      CHECK(to[5] == (std::isnan(x) ? (high | 0x40) : high + up), "%x: %x", wide, to[5]);
    }
  }
}

void test_small_integers() {
  for (int first = -128; first < 128; first += kLanes) {
    int8_t from[kLanes], to[kLanes];
    for (int i = 0; i < kLanes; ++i) from[i] = static_cast<int8_t>(first + i);
    const F16 loaded = load_int8(from);
    store_int8(to, loaded);
    for (int i = 0; i < kLanes; ++i) CHECK(Lanes(loaded).at[i] == first + i && to[i] == from[i], "%d", first);
  }
  for (float x = -140; x < 140; x += 0.03125f) {
    CHECK(Lanes(round_even(broadcast(x))).at[9] == std::nearbyint(x), "%g", x);
    CHECK(Lanes(to_float(to_words(broadcast(x)))).at[9] == std::trunc(x), "%g", x);
    CHECK(same_bits(Lanes(absolute(broadcast(x))).at[2], std::fabs(x)), "%g", x);
  }
  CHECK(same_bits(Lanes(absolute(broadcast(-0.0f))).at[0], 0.0f), "-0");
  CHECK(std::isnan(Lanes(absolute(broadcast(-kNaN))).at[0]), "NaN");
}

// Eight words of the largest and smallest bytes, and of random ones: nothing saturates.
void test_dots() {
  Random random(4);
  const int largest = Native::kNibblesOnly ? 15 : 255;
  for (int round = 0; round < 300; ++round) {
    int64_t expected[Native::kWidth];
    const int32_t bias = static_cast<int32_t>(random.below(1 << 20)) - (1 << 19);
    for (int64_t& each : expected) each = bias;
    Native::Dots sum = Native::start_dots(bias);
    for (int w = 0; w < 8; ++w) {
      uint8_t bytes[Native::kWidth][4];
      int8_t four[4];
      for (int8_t& each : four)
        each = static_cast<int8_t>(round == 0 ? 127 : round == 1 ? -127 : random.below(255) - 127);
      for (int lane = 0; lane < Native::kWidth; ++lane)
        for (int j = 0; j < 4; ++j) {
          bytes[lane][j] = static_cast<uint8_t>(round < 2 ? largest : random.below(largest + 1));
          expected[lane] += bytes[lane][j] * four[j];
        }
      Native::Ints words;
      int32_t word;
      std::memcpy(&words, bytes, sizeof words);
      std::memcpy(&word, four, sizeof word);
      sum = Native::dot(sum, words, word);
    }
    const Native::Ints out = Native::finish_dots(sum, bias);
    for (int lane = 0; lane < Native::kWidth; ++lane)
      CHECK(out[lane] == expected[lane], "round %d lane %d: %d", round, lane, out[lane]);
  }
}

bool machine_has_it() {
  for (const Kernels* set : sets_of_this_machine())
    if (std::string_view(set->name) == PAGECAST_STRING(PAGECAST_SET)) return true;
  return false;
}

}  // namespace
}  // namespace pagecast::PAGECAST_SET

int main() {
  using namespace pagecast::PAGECAST_SET;
  if (!machine_has_it()) {
    std::printf("skipped: this machine lacks the set\n");
    return 0;
  }
  test_arithmetic();
  test_some_lanes();
  test_sum_is_a_fixed_tree();
  test_max_drops_a_nan_on_the_left_and_keeps_one_on_the_right();
  test_exp();
  test_words();
  test_halves();
  test_bfloats();
  test_small_integers();
  test_dots();
  return report();
}
