/* As much of the driver as cuda_rescue_child calls, over files: shares are file descriptors that are mapped. */
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int cuInit(unsigned flags) { return flags; }
int cuDeviceGet(int *device, int index) { *device = index; return index < 2 ? 0 : 101; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { memset(uuid, 0x10 + device, 16); return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(uintptr_t)(device + 1); return 0; }
int cuCtxSetCurrent(void *context) { return context == 0; }
int cuCtxSynchronize(void) { return 0; }
int cuMemImportFromShareableHandle(uint64_t *handle, void *source, int kind) {
    *handle = kind == 1 ? (uint64_t)(uintptr_t)source : *(unsigned char *)source; /* FABRIC: the first of 64 bytes */
    return kind == 1 || kind == 8 ? 0 : 1;
}
int cuMemAddressReserve(uint64_t *address, size_t size, size_t alignment, uint64_t wanted, uint64_t flags) {
    void *found = mmap(0, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *address = (uint64_t)(uintptr_t)found;
    return found == MAP_FAILED || size % (2 << 20) || alignment || wanted || flags;
}
int cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
    void *at = (void *)(uintptr_t)address;
    return mmap(at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle, (off_t)offset) != at || flags;
}
int cuMemSetAccess(uint64_t address, size_t size, const int *access, size_t count) {
    if (count != 1 || access[0] != 1 || access[1] != 1 || access[2] != 3) return 1;
    return mprotect((void *)(uintptr_t)address, size, PROT_READ | PROT_WRITE);
}
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) { memcpy(to, (void *)(uintptr_t)from, size); return 0; }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) { memcpy((void *)(uintptr_t)to, from, size); return 0; }
int cuMemsetD8_v2(uint64_t to, unsigned char value, size_t size) { memset((void *)(uintptr_t)to, value, size); return 0; }
