// Between natural logarithms and those in base 2.
#pragma once

namespace seq1f1b::cpu {

constexpr double log2e = 1.4426950408889634074, ln2 = 0.69314718055994530942;

}  // namespace seq1f1b::cpu
