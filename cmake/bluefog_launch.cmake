# SPDX-License-Identifier: Apache-2.0
#
# How this project's own programs are started with several ranks on one machine.

# More ranks than cores, as root or not, one thread each; by environment, so that the same command
# line serves Open MPI 4 and 5 and MPICH. Each ignores what it does not know.
set(BLUEFOG_LAUNCH_ENVIRONMENT
  OMPI_ALLOW_RUN_AS_ROOT=1
  OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  OMPI_MCA_rmaps_base_oversubscribe=1
  OMPI_MCA_hwloc_base_binding_policy=none
  OMPI_MCA_mpi_yield_when_idle=1
  PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
  PRTE_MCA_hwloc_default_binding_policy=none
  OMP_NUM_THREADS=1)

# What the sanitizers are told. Under MPI, libraries that unload at exit leave reports whose suppression
# needs whole stacks, which take a slow walk at every allocation.
set(BLUEFOG_SANITIZER_ENVIRONMENT
  "ASAN_OPTIONS=detect_stack_use_after_return=1:intercept_tls_get_addr=0"
  "LSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/tests/support/leaks.supp:print_suppressions=0"
  "UBSAN_OPTIONS=print_stacktrace=1"
  "TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1:suppressions=${PROJECT_SOURCE_DIR}/tests/support/races.supp")

# The environment of a program under MPI.
list(TRANSFORM BLUEFOG_SANITIZER_ENVIRONMENT REPLACE "^ASAN_OPTIONS=" "ASAN_OPTIONS=fast_unwind_on_malloc=0:"
  OUTPUT_VARIABLE BLUEFOG_MPI_ENVIRONMENT)
list(PREPEND BLUEFOG_MPI_ENVIRONMENT ${BLUEFOG_LAUNCH_ENVIRONMENT})

# bluefog_launch_command(<variable> <ranks>)
#
# Sets <variable> to the words that go before a program to start it with <ranks> ranks.
function(bluefog_launch_command variable ranks)
  set(${variable} "${MPIEXEC_EXECUTABLE}" ${MPIEXEC_NUMPROC_FLAG} ${ranks} ${MPIEXEC_PREFLAGS} PARENT_SCOPE)
endfunction()

# BLUEFOG_MPI_FLAVOUR: "Open MPI" or "MPICH", by what the launcher says of itself.
set(BLUEFOG_MPI_FLAVOUR "")
if(BLUEFOG_WITH_MPI)
  execute_process(COMMAND "${MPIEXEC_EXECUTABLE}" --version
    OUTPUT_VARIABLE bluefog_launcher ERROR_VARIABLE bluefog_launcher)
  if(bluefog_launcher MATCHES "Open MPI|OpenRTE|prrte|PRRTE")
    set(BLUEFOG_MPI_FLAVOUR "Open MPI")
  elseif(bluefog_launcher MATCHES "HYDRA|MPICH")
    set(BLUEFOG_MPI_FLAVOUR "MPICH")
  endif()
endif()
