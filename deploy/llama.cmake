# What llama-cpp-python compiles of llama.cpp: the library alone. The chat templates, parsers and downloads of llama.cpp's own
# programs (`common`) take as long again, and nothing here calls them; CMakeLists.txt sets the cached variable, this one hides it.
set(LLAMA_BUILD_COMMON OFF)

# What decides is computed in ggml, at -O3 as ever: logits and milliseconds are the same. Around it, building graphs and reading
# files, -O1 and headers that are read once are compiled in two thirds of the time.
cmake_language(DEFER CALL target_compile_options llama PRIVATE -O1)
cmake_language(DEFER CALL target_precompile_headers llama PRIVATE
  <algorithm> <cmath> <cstring> <functional> <map> <memory> <regex> <set> <sstream> <string> <unordered_map> <vector>)
