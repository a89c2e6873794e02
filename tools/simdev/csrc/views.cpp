#include "views.h"

#include <c10/util/Exception.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

namespace simdev {
namespace {
struct sigaction before {};

size_t in_pages(size_t nbytes) {
  static const size_t page = sysconf(_SC_PAGESIZE);
  return (nbytes + page - 1) / page * page;
}

void on_fault(int, siginfo_t* info, void*) {
  // Anything else is somebody else's: it happens again, with the handler that was there before.
  if (!host_touches(info->si_addr)) sigaction(SIGSEGV, &before, nullptr);
}

// Others install handlers too, and late: pytest does.
void listen() {
  struct sigaction now {};
  sigaction(SIGSEGV, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_fault) return;
  before = now;
  struct sigaction ours {};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &ours, nullptr);
}

char* map(int file, size_t nbytes) {
  void* made = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  TORCH_CHECK(made != MAP_FAILED, "simdev: the host's own memory is out");
  return static_cast<char*>(made);
}
}  // namespace

Views map_twice(size_t nbytes) {
  nbytes = in_pages(nbytes);
  const int file = memfd_create("simdev", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && ftruncate(file, nbytes) == 0, "simdev: the host's own memory is out");
  const Views views{map(file, nbytes), map(file, nbytes)};
  close(file);
  return views;
}

void unmap(const Views& views, size_t nbytes) {
  munmap(views.host, in_pages(nbytes));
  munmap(views.device, in_pages(nbytes));
}

void open_host_view(const Views& views, size_t nbytes, Open open) {
  const int allowed[] = {PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE};
  if (open != Open::kAll) listen();
  mprotect(views.host, in_pages(nbytes), allowed[static_cast<int>(open)]);
}

}  // namespace simdev
