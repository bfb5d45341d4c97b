// VK_EXT_layer_settings as far as ggml-vulkan.cpp uses it, for headers of Vulkan that are older.
// Given with -include; not needed where <vulkan/vulkan.hpp> knows vk::LayerSettingEXT.
#pragma once
#ifdef __cplusplus

#include <cstdint>
#include <vector>
#include <vulkan/vulkan.h>

namespace vk {

enum class LayerSettingTypeEXT { eBool32 = 0 };

struct LayerSettingEXT {
    const char *        pLayerName;
    const char *        pSettingName;
    LayerSettingTypeEXT type;
    uint32_t            valueCount;
    const void *        pValues;
};

struct LayerSettingsCreateInfoEXT {
    VkStructureType         sType = static_cast<VkStructureType>(1000496000);
    const void *            pNext = nullptr;
    uint32_t                settingCount;
    const LayerSettingEXT * pSettings;

    explicit LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> & settings)
        : settingCount(static_cast<uint32_t>(settings.size())), pSettings(settings.data()) {}
};

}  // namespace vk

#endif
