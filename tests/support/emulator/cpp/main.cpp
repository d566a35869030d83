// Reads a job from stdin, runs the kernel, says on stdout how it went. One process for each call,
// so that a broken kernel takes nothing with it.
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#ifdef __linux__
#include <link.h>
#endif

#include "state.h"

namespace emu {

[[noreturn]] void report(const Fault& fault) {
  printf("fault\t%s\nmessage\t%s\ngroup\t%u\nthreads\t", fault.kind, fault.message.c_str(), group);
  if (fault.threads.empty() && current >= 0) printf("%d", current);
  for (size_t i = 0; i < fault.threads.size(); i++) printf(i ? ",%d" : "%d", fault.threads[i]);
  printf("\n");
  if (fault.file) printf("at\t%u\t%u\t%s\n", fault.line, fault.column, fault.file);
  // A return address points behind the call: one byte back is inside it.
  if (fault.pc)
    printf("pc\t%lx\n", (unsigned long)(static_cast<char*>(fault.pc) - launch.code_low - 1));
  if (fault.other)
    printf("other\t%lx\n", (unsigned long)(static_cast<char*>(fault.other) - launch.code_low - 1));
  fflush(stdout);
  _exit(0);
}

static void on_signal(int number, siginfo_t* info, void*) {
  if (number == SIGFPE) report({"divide", "integer division by zero, or overflow", {}});
  char* address = static_cast<char*>(info->si_addr);
  if (stacks && in_stacks(address)) report({"stack", "a thread needs more than its stack", {}});
  Region* r = region_at(address);
  if (r && r->mode == Mode::kInput && address < r->high)
    report({"input-write", "writes " + r->name + ", an input", {}});
  r = nearest_region(address);
  if (r) report({"out-of-bounds", "an address outside of " + r->name, {}});
  report({"crash", text("signal %d", number), {}});
}

static void catch_signals() {
  static char alternate[64 * 1024];
  stack_t stack{};
  stack.ss_sp = alternate, stack.ss_size = sizeof alternate;
  sigaltstack(&stack, nullptr);
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigaction(number, &action, nullptr);
}

#ifdef __linux__
static int find_code(dl_phdr_info* info, size_t, void*) {
  if (reinterpret_cast<char*>(info->dlpi_addr) != launch.code_low) return 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const auto& part = info->dlpi_phdr[i];
    char* end = launch.code_low + part.p_vaddr + part.p_memsz;
    if (part.p_type == PT_LOAD && end > launch.code_high) launch.code_high = end;
  }
  return 1;
}
#endif

static void load(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  void* entry = library ? dlsym(library, "emu_entry") : nullptr;
  if (!entry) report({"load", dlerror(), {0}});
  launch.entry = reinterpret_cast<decltype(launch.entry)>(entry);
  Dl_info info;
  dladdr(entry, &info);
  launch.code_low = launch.code_high = static_cast<char*>(info.dli_fbase);
#ifdef __linux__
  dl_iterate_phdr(find_code, nullptr);
#endif
}

static void add_buffer(int file, const char* line) {
  static const char* kModes[] = {"input", "output", "filled"};
  char name[128], mode[16];
  size_t nbytes, offset;
  unsigned itemsize;
  sscanf(line, "%127s %zu %zu %15s %u", name, &nbytes, &offset, mode, &itemsize);
  auto* r = new Region;
  r->name = name, r->itemsize = itemsize;
  for (int i = 0; i < 3; i++)
    if (!strcmp(mode, kModes[i])) r->mode = Mode(i);
  // The data ends at the end of a page where it can, so that the gap behind it is felt.
  size_t inside = offset % kPage;
  char* page = reserve(nbytes + inside);
  r->low = page + inside, r->high = r->low + nbytes;
  bool input = r->mode == Mode::kInput;
  if (nbytes && mmap(page, nbytes + inside, input ? PROT_READ : PROT_READ | PROT_WRITE,
                     MAP_FIXED | (input ? MAP_PRIVATE : MAP_SHARED), file,
                     off_t(offset - inside)) == MAP_FAILED)
    report({"limit", "cannot map the buffer " + r->name, {0}});
  adopt(r);
  launch.buffers.push_back(r->low);
}

static void run_grid(bool descending) {
  launch.descending = descending;
  for (Region* r : regions)
    if (r->mode == Mode::kOutput)
      memset(r->low, descending ? 0x7e : 0xff, size_t(r->high - r->low));
  uint32_t count = launch.groups.volume();
  for (uint32_t i = 0; i < count; i++) run_group(descending ? count - 1 - i : i);
}

// Without checks: both orders of the threads must give the same bits.
static void run_both_orders() {
  std::vector<Region*> outputs;
  std::vector<std::string> before, first;
  auto copy = [](Region* r) { return std::string(r->low, r->high); };
  for (Region* r : regions)
    if (r->mode == Mode::kOutput || r->mode == Mode::kFilled)
      outputs.push_back(r), before.push_back(copy(r));
  run_grid(false);
  for (size_t i = 0; i < outputs.size(); i++) {
    first.push_back(copy(outputs[i]));
    memcpy(outputs[i]->low, before[i].data(), before[i].size());
  }
  run_grid(true);
  for (size_t i = 0; i < outputs.size(); i++) {
    Region* r = outputs[i];
    size_t at = 0, nbytes = first[i].size();
    while (at < nbytes && r->low[at] == first[i][at]) at++;
    if (at < nbytes)
      report(
          {"order",
           text("%s[%zu] depends on the order of the threads", r->name.c_str(), at / r->itemsize),
           {0}});
    memcpy(r->low, first[i].data(), nbytes);
  }
}

}  // namespace emu

using namespace emu;

int main() {
  catch_signals();
  char line[4096];
  int file = -1;
  while (fgets(line, sizeof line, stdin)) {
    line[strcspn(line, "\n")] = 0;
    char* rest = strchr(line, ' ');
    if (!rest) break;
    *rest++ = 0;
    std::string key = line;
    auto three = [&](Three& t) { sscanf(rest, "%u %u %u", &t.x, &t.y, &t.z); };
    if (key == "checks")
      launch.checks = atoi(rest);
    else if (key == "threadgroup_memory")
      launch.threadgroup_memory = size_t(atol(rest));
    else if (key == "data")
      file = open(rest, O_RDWR);
    else if (key == "grid")
      three(launch.grid);
    else if (key == "threads")
      three(launch.threads);
    else if (key == "library")
      load(rest);
    else if (key == "buffer")
      add_buffer(file, rest);
  }
  Three g = launch.grid, t = launch.threads;
  launch.groups = {g.x / t.x, g.y / t.y, g.z / t.z};
  stacks = kStacks + static_cast<char*>(mmap(nullptr, 2 * kStacks, PROT_NONE,
                                             MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0));
  for (uint32_t i = 0; i < t.volume(); i++)
    mprotect(stacks + i * kStack + kPage, kStack - kPage, PROT_READ | PROT_WRITE);
  if (launch.checks) {
    run_grid(false);
    check_outputs();
  } else {
    run_both_orders();
  }
  printf("ok\n");
  fflush(stdout);
  _exit(0);
}
