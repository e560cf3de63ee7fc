// The standard library's headers, for files that choose an instruction set: to be included before they do. What these
// define is shared by all files of the library, so it must run on any processor.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>
