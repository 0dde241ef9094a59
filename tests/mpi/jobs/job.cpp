// SPDX-License-Identifier: Apache-2.0
//
// One rank of a job that ends in one of many ways; run_jobs.py starts it and judges the whole.
//
//   job SCENARIO

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <mpi.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <bluefog/collective/allreduce.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/reduce_op.hpp>
#include <bluefog/mpi.hpp>

namespace {

using comm_type = bluefog::communicator<bluefog::mpi_backend>;
using std::chrono::seconds;

std::optional<comm_type> global;  // goes down after MPI is finalised

void work(comm_type& comm) {
  std::vector<double> values(1000, 1.0);
  bluefog::allreduce(comm, values, values, bluefog::reduce_op::sum);
  if (values.front() != comm.size()) throw std::logic_error("wrong sum");
}

void say(const comm_type& comm, const std::string& text) {
  std::printf("rank %d %s\n", comm.rank(), text.c_str());
  std::fflush(stdout);
}

/// Rank 1 throws, the others wait for it.
void one_rank_throws() {
  comm_type comm;
  work(comm);
  if (comm.rank() == 1) throw std::runtime_error("the data are gone");
  work(comm);
}

/// The exception leaves the communicator's scope, is caught, and main returns 0.
void one_rank_throws_and_main_catches() {
  try {
    one_rank_throws();
  } catch (const std::exception& problem) {
    std::printf("caught: %s\n", problem.what());
  }
}

void one_rank_throws_inside_the_scope() {
  comm_type comm;
  try {
    if (comm.rank() == 1) throw std::runtime_error("not so bad");
  } catch (const std::exception&) {
    say(comm, "goes on");
  }
  work(comm);
  say(comm, "is done");
}

/// All ranks lose a communicator to an exception and make another one.
void all_ranks_recover() {
  try {
    comm_type comm;
    work(comm);
    throw std::runtime_error("once more");
  } catch (const std::exception&) {
  }
  comm_type comm;
  work(comm);
  say(comm, "is done");
}

/// An exception ends a communicator within the scope of another, which goes on.
void a_part_is_lost() {
  comm_type comm;
  try {
    auto part = comm.split(comm.rank() % 2);
    if (comm.rank() == 1) throw std::runtime_error("only a part");
  } catch (const std::exception&) {
  }
  work(comm);
  say(comm, "is done");
}

void a_global_outlives_mpi() {
  global.emplace();
  work(*global);
  std::vector<float> values(10, 1.0F);
  bluefog::allreduce_nonblocking(*global, values, values).wait();  // starts the thread
  say(*global, global->transport().any_thread() ? "has a communication thread"
                                                : "has no communication thread");
  say(*global, "is done");
}

void again_and_again() {
  for (int i = 0; i < 50; ++i) {
    comm_type comm;
    work(comm);
    if (i == 49) say(comm, "is done");
  }
}

void the_program_keeps_its_mpi() {
  MPI_Init(nullptr, nullptr);
  {
    comm_type comm;
    work(comm);
    say(comm, "is done");
  }
  MPI_Barrier(MPI_COMM_WORLD);
  int sum = 1;
  MPI_Allreduce(MPI_IN_PLACE, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  std::printf("sum %d\n", sum);
  MPI_Finalize();
}

/// Only one rank of the job, as each process of a wrong launcher has it.
void the_program_gives_its_world() {
  MPI_Init(nullptr, nullptr);
  comm_type comm(MPI_COMM_WORLD);
  work(comm);
  say(comm, "is done");
}

/// The exception is caught, and the program goes to its own MPI_Finalize, where rank 0 never comes.
void one_rank_throws_before_the_programs_finalize() {
  MPI_Init(nullptr, nullptr);
  try {
    comm_type comm(MPI_COMM_WORLD);
    work(comm);
    if (comm.rank() == 1) throw std::runtime_error("the data are gone");
    work(comm);
  } catch (const std::exception& problem) {
    std::printf("caught: %s\n", problem.what());
  }
  MPI_Finalize();
}

void one_rank_makes_no_communicator() {
  comm_type comm;
  work(comm);
  if (comm.rank() == 1) std::this_thread::sleep_for(seconds(20));
  comm_type another;
}

void the_program_finalizes() {
  global.emplace();
  work(*global);
  say(*global, "is done");
  MPI_Finalize();
  try {
    comm_type late;
  } catch (const bluefog::usage_error& problem) {
    std::printf("late: %s\n", problem.what());
  }
}

void one_rank_is_killed() {
  comm_type comm;
  work(comm);
  if (comm.rank() == 1) std::raise(SIGKILL);
  work(comm);
}

void odd_ranks_are_late() {
  comm_type comm;
  if (comm.rank() % 2 == 1) std::this_thread::sleep_for(seconds(20));
  work(comm);
}

void late_and_caught() {
  comm_type comm;
  try {
    if (comm.rank() == 1) std::this_thread::sleep_for(seconds(20));
    work(comm);
  } catch (const bluefog::timeout_error& problem) {
    std::printf("caught: %s\n", problem.what());
  }
}

/// Rank 1 comes first and has given up when the last rank comes.
void ranks_are_late(const std::function<void(comm_type&)>& make) {
  comm_type comm;
  try {
    if (comm.rank() != 1) std::this_thread::sleep_for(seconds(2 + comm.rank()));
    make(comm);
  } catch (const bluefog::timeout_error& problem) {
    if (comm.rank() != 1) throw;
    std::printf("caught: %s\n", problem.what());
    std::fflush(stdout);
    std::this_thread::sleep_for(seconds(20));
  }
}

void exit_with_a_request_in_flight() {
  comm_type comm;
  std::vector<double> values(1000000, 1.0);
  if (comm.rank() == 1) {
    std::this_thread::sleep_for(seconds(20));
    return;
  }
  auto request = bluefog::allreduce_nonblocking(comm, values, values);
  std::exit(0);
}

void terminate() {
  comm_type comm;
  if (comm.rank() == 1) std::terminate();
  work(comm);
}

void plain() {
  comm_type comm;
  work(comm);
  say(comm, "is done");
}

/// What each rank knows of machines, and groups of their ranks at work.
void machines() {
  comm_type comm;
  auto local = comm.local();
  work(local);
  auto leaders = comm.leaders();
  if (leaders) work(*leaders);
  say(comm, bluefog::concat("is ", comm.local_rank(), " of ", comm.local_size(), " on machine ",
                            comm.machine_rank(), " of ", comm.machine_size(), "; ", local.size(),
                            " in local, ", leaders ? leaders->size() : 0, " in leaders"));
}

/// A filter, as containers have it, forbids the process to read another's memory.
void single_copy_is_forbidden() {
  std::array program{
      sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 0, 1),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0)
    throw std::runtime_error("the filter was refused");
  plain();
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, std::function<void()>> scenarios{
      {"throw", one_rank_throws},
      {"catch-outside", one_rank_throws_and_main_catches},
      {"catch-inside", one_rank_throws_inside_the_scope},
      {"recover", all_ranks_recover},
      {"lose-a-part", a_part_is_lost},
      {"global", a_global_outlives_mpi},
      {"again", again_and_again},
      {"user-initializes", the_program_keeps_its_mpi},
      {"user-world", the_program_gives_its_world},
      {"user-throws", one_rank_throws_before_the_programs_finalize},
      {"user-finalizes", the_program_finalizes},
      {"alone-at-construction", one_rank_makes_no_communicator},
      {"killed", one_rank_is_killed},
      {"late", odd_ranks_are_late},
      {"late-caught", late_and_caught},
      {"late-split", [] { ranks_are_late([](auto& comm) { static_cast<void>(comm.split(0)); }); }},
      {"late-companion",
       [] { ranks_are_late([](auto& comm) { static_cast<void>(comm.companion()); }); }},
      {"exit", exit_with_a_request_in_flight},
      {"terminate", terminate},
      {"plain", plain},
      {"machines", machines},
      {"no-single-copy", single_copy_is_forbidden},
  };
  const auto found = scenarios.find(argc > 1 ? argv[1] : "");
  if (found == scenarios.end()) {
    std::fprintf(stderr, "job: no such scenario\n");
    return 2;
  }
  found->second();
  return 0;
}
