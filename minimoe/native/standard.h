// The standard library's headers, for files that choose an instruction set: to be included before they do. What these
// define is shared by all files of the library, so it must run on any processor.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <utility>
#include <vector>
