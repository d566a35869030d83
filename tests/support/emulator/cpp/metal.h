// Everything a body may use. The wrapper includes this file and says `using namespace metal`.
#pragma once
#include "matrix.h"
