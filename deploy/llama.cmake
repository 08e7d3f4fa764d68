# What llama-cpp-python compiles of llama.cpp: the library alone. The chat templates, parsers and downloads of llama.cpp's own
# programs (`common`) take as long again, and nothing here calls them; CMakeLists.txt sets the cached variable, this one hides it.
set(LLAMA_BUILD_COMMON OFF)

# The files that lay out each architecture's graph are 150, and say what is computed, in ggml, at -O3 as ever: they are compiled at
# -O1, with headers that are read once. So is nothing that runs for a token: vocabularies, grammars, sampling, batches, caches.
file(GLOB others ${CMAKE_CURRENT_SOURCE_DIR}/vendor/llama.cpp/src/*.cpp)
cmake_language(DEFER CALL target_compile_options llama PRIVATE -O1)
cmake_language(DEFER CALL target_precompile_headers llama PRIVATE
  <algorithm> <cmath> <cstring> <functional> <map> <memory> <regex> <set> <sstream> <string> <unordered_map> <vector>)
cmake_language(DEFER CALL set_source_files_properties ${others} TARGET_DIRECTORY llama
  PROPERTIES COMPILE_OPTIONS -O3 SKIP_PRECOMPILE_HEADERS ON)
