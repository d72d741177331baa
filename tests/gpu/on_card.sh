#!/usr/bin/env bash
# The tests and benchmarks on the machine with the GPU, from a folder that tests/gpu/pack.sh made:
#
#   bash tests/gpu/on_card.sh FOLDER [operators] [engines] [stripped] [sanitizer] [slice]
#
# No compiler of any kind is used. A part that fails does not keep the others from running; the last lines say which did.
set -uo pipefail
folder=$(realpath "$1")
shift
python=${PYTHON:-python3}
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export DSV4C_LIBRARY=$folder/libdsv4c.so DSV4C_CACHE_DIR=$folder/cubins DSV4C_GPU_CASES=$folder
pytest=("$python" -m pytest -p no:cacheprovider --quiet --tb=short -m gpu)
engine=$folder/trained-reference.dsv4c
prompt=(0 17 290 1033 5)
summary=()

# A folder's files, with sizes and times, to see that nothing is written.
snapshot() { find "$HOME" /tmp "$folder" /dev/shm -xdev -newer "$1" -type f 2>/dev/null | sort; }

operators() { "${pytest[@]}" tests/kernels; }

engines() {
  "${pytest[@]}" tests/gpu -s && "$python" -m dsv4c verify --replay "$engine" &&
    "$python" -m dsv4c bench "$engine" --slots 4
}

# The example program with an empty environment: no Python, torch, CUDA toolkit or compiler on any path.
stripped() {
  local mark loader
  mark=$(mktemp) && sleep 1
  loader=$(ldconfig -p | awk '/libcuda\.so\.1/ { print $NF; exit }')
  echo "driver library: ${loader:-not known to ldconfig; LD_LIBRARY_PATH is $LD_LIBRARY_PATH}"
  local library_path=$folder
  [ -n "$loader" ] || library_path=$folder:${LD_LIBRARY_PATH:-}
  time env -i LD_LIBRARY_PATH="$library_path" "$folder/generate" "$engine" 24 "${prompt[@]}" || return 1
  echo "files written:"
  snapshot "$mark"
  [ -z "$(snapshot "$mark")" ]
}

# Not the driver's own errors: opening asks each kernel for one parameter more than it has, to count them.
sanitizer() {
  local tool failed=0
  for tool in memcheck racecheck; do
    echo "compute-sanitizer --tool $tool"
    LD_LIBRARY_PATH=$folder:${LD_LIBRARY_PATH:-} timeout 200 compute-sanitizer --tool "$tool" --error-exitcode 9 \
      --report-api-errors no "$folder/generate" "$engine" 6 $(seq 1 200) 2>&1 | tail -20
    [ "${PIPESTATUS[0]}" = 0 ] || failed=1
  done
  return $failed
}

slice() {
  local target=${SLICE_FOLDER:-/dev/shm}/slice.dsv4c
  "$python" -m tests.benchmarks.h100_slice fill "$folder/slice" "$target" &&
    "$python" -m tests.benchmarks.h100_slice run "$target" --profile
}

for part in "${@:-operators}"; do
  echo "== $part"
  started=$SECONDS
  if "$part"; then result=passed; else result=FAILED; fi
  summary+=("$part: $result in $((SECONDS - started)) s")
done
echo "== summary"
printf '%s\n' "${summary[@]}"
[[ ${summary[*]} != *FAILED* ]]
