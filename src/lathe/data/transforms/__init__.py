"""What `data.augment` may list: batched transforms of training images, on the device, seeded for each sample."""
