// Stands for <metal_stdlib> and for the helpers that MLX puts before every custom kernel.
#pragma once

#include "simd.h"

#define METAL_FUNC inline __attribute__((always_inline))
#define MLX_MTL_CONST static constexpr constant const
#define MLX_MTL_PRAGMA_UNROLL
#define MLX_MTL_LOOP_UNROLL
#define device
#define constant
#define thread

using namespace metal;

template <typename T, typename U> inline T ceildiv(T n, U m) { return (n + m - 1) / m; }

template <typename T> struct Limits {
  static constexpr T most() {
    if constexpr (is_floating_point_v<T>) return metal::numeric_limits<T>::infinity();
    else return metal::numeric_limits<T>::max();
  }
  static constexpr T least() {
    if constexpr (is_floating_point_v<T>) return T(-metal::numeric_limits<T>::infinity());
    else return metal::numeric_limits<T>::lowest();
  }
  static constexpr const T max = most();
  static constexpr const T min = least();
  static constexpr const T finite_max = metal::numeric_limits<T>::max();
  static constexpr const T finite_min = metal::numeric_limits<T>::lowest();
};

// The offset of an element in an array with strides, from its index in row-major order.
template <typename Index = int64_t>
inline Index elem_to_loc(Index element, const int* shape, const int64_t* strides, int ndim) {
  Index offset = 0;
  for (int i = ndim - 1; i >= 0; --i) {
    offset += Index(element % shape[i]) * Index(strides[i]);
    element /= shape[i];
  }
  return offset;
}
template <typename Index = int64_t>
inline Index elem_to_loc(uint3 element, const int* shape, const int64_t* strides, int ndim) {
  Index offset = Index(element.x) * Index(strides[ndim - 1]) + Index(element.y) * Index(strides[ndim - 2]);
  for (int i = ndim - 3; i >= 0; --i) {
    offset += Index(element.z % shape[i]) * Index(strides[i]);
    element.z /= shape[i];
  }
  return offset;
}

// Metal has neither double nor 80-bit floating point.
#define double there_is_no_double_in_metal
