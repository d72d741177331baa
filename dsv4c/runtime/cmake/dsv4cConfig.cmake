# find_package(dsv4c) -> target dsv4c::dsv4c
include("${CMAKE_CURRENT_LIST_DIR}/dsv4cTargets.cmake")
