/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <waybill/waybill.h>

int main(void) {
  if (wb_check_version(WB_ABI_VERSION, WB_VERSION_STRING) != WB_OK) {
    fprintf(stderr, "%s\n", wb_last_error());
    return 1;
  }
  wb_group* group = NULL;
  if (wb_group_create(2, 0, 0, &group) != WB_OK) return 1;
  wb_group_destroy(group);
  puts(wb_version());
  return 0;
}
