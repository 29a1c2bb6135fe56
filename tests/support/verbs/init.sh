#!/bin/bash
# Process 1 of a guest: its links to the other guest and to the host, software RoCE on the first of them, and sshd.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs -o size=50% shm /dev/shm
mount -t tmpfs run /run
mkdir -p /run/sshd /run/lock
number=$(sed -n 's/.*guest=\([0-9]*\).*/\1/p' /proc/cmdline)
hostname "guest$number"
printf '127.0.0.1 localhost\n10.78.0.1 guest1\n10.78.0.2 guest2\n' >/etc/hosts
modprobe -a virtio_net
ip link set lo up
ip link set eth0 up mtu 4200 # payloads: a packet of RoCE takes 4096 bytes
ip address add "10.77.0.$number/24" dev eth0
ip link set eth1 up # what guests say to each other while the first link is down
ip address add "10.78.0.$number/24" dev eth1
ip link set eth2 up # the host, which reaches sshd here
ip address add "10.0.$number.15/24" dev eth2
modprobe -a ib_uverbs rdma_rxe
modprobe -a sch_ingress cls_matchall act_gact # for packets that tests drop
rdma link add rxe0 type rxe netdev eth0
ip route add default dev eth0
ulimit -l unlimited
ulimit -n 65536
/usr/sbin/sshd
[ "$number" = 2 ] || (until ssh -fNM -o ControlPath=/run/guest2.ssh -o ConnectTimeout=60 guest2 2>/dev/null; do sleep 1; done) &
echo "guest $number is up: $(rdma link)" >/dev/ttyS0
sleep infinity
